# comment
@timeStamps false
@dimensions 1
@classLabel true x
@data
1e5,-2:x
